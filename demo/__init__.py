"""The demo: four users on a simulated GPU."""
