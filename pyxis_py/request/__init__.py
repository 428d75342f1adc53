"""What a step asks for, and how the plugin says it."""
