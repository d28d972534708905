//! The formats from outside: golden vectors, properties, mutated vectors, and the dissector.

mod dissector;
mod golden;
mod json;
mod mutation;
mod property;
mod vector;
