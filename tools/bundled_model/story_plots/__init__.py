"""What happens in stories: functions from a `Cast` to paragraphs (stories.py)."""
