//! The library against an agent for tests that speaks the format of the program socket.

mod agent;
mod examples;
mod fake;
mod frames;
mod hand_over;
mod sockets;
