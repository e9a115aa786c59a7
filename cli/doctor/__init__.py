"""`sluice doctor`: gathers facts about the machine and the models, checks them, reports findings."""
