"""The record of everything: SQLAlchemy models, migrations, ingestion and queries."""
