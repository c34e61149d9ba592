"""visacc.metrics."""
