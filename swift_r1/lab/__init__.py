"""Looks at runs and plans them: reads run folders through `swift_r1.record`; nothing that trains imports it."""
