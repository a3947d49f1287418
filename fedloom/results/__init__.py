"""What a run leaves behind: numbers, tables, figures, statistics, the report, exports."""
