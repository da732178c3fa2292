"""The record: SQLAlchemy models, migrations, ingestion and queries."""
