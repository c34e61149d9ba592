"""Vision-language targets: transformers models driven through their own modules, and the embedded
captioner.
"""
