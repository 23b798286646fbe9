"""Text to n-grams and how often they occur."""
