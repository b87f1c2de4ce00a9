"""The subcommands of ``jaxmoe``: a module each, with ``add_arguments(parser)`` and ``run(arguments)``.

``layer_arguments`` is what several of them share.
"""
