"""Python interfaces of other engines, built on pipemega: their scripts run without an edit."""
