"""Entry points for users of other libraries: ``generate(custom_generate=...)``, ``attach``, diffusers pipelines."""
