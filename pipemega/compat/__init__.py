"""Other engines' Python interfaces, over that of pipemega: scripts run without an edit."""
