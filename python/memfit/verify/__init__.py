"""Verification: a plan's steps beside unplanned ones, number for number and byte for byte.

``eager`` verifies eager plans, ``compiled`` plans under ``torch.compile``.
"""
