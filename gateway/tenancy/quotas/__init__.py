"""Quotas: what keys and tenants may use in a minute, a day and a month, and at the same time."""
