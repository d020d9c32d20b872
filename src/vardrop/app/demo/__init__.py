"""The demo: seven ways to train one small model on scikit-learn's digits, compared."""

from vardrop.app.demo.table import main as main
