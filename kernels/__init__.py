"""visacc.kernels."""
