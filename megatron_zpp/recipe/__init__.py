"""What builds a rank's model and its optimizer from a configuration."""
