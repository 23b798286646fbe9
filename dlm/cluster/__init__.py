"""A cluster on one machine: started and watched."""
