"""The built-in data: small scenes, drawn and described."""
