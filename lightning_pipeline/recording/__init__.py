"""The user's step as events: recorded once for each micro-batch on placeholders, and run in parts by stage."""
