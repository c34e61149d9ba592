"""visacc.models."""
