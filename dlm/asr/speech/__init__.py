"""From audio to words, and how many of them are right."""
