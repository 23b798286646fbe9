"""Generated from proto/ by `python -m dlm.wire.generate`; do not edit."""
