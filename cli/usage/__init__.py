"""`sluice usage`: shows and exports what keys, tenants and models used."""
