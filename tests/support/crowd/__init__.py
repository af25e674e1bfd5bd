"""A crowd of tenants before the controller: traffic, what serving it costs, and the windows that tell."""
