"""A cluster on one machine: started, watched, and broken on purpose."""
