//! The sandbox for end-to-end tests, and the tests.
