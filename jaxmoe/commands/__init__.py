"""The subcommands of ``jaxmoe``: each module has ``add_arguments(parser)`` and ``run(arguments)``."""
