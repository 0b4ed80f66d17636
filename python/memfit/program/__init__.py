"""What the ``memfit`` program asks of Python: loading a user's file, and the steps that need torch.

``host`` answers the program's requests, ``target`` loads what a command line names.
"""
