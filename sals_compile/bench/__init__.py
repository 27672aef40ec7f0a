"""Real models and real text to measure on, and the measurements themselves."""
