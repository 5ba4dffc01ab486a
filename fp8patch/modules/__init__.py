"""Modules that take the place of stock ones, class by class."""
