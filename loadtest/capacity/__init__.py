"""How many servers a load needs: measured, or simulated."""
