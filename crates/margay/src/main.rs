//! margay
fn main() {}
