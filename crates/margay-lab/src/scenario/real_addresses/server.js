// Tells each client the address that it is seen by: PROTOCOL PORT ADDRESS.
const dgram = require("dgram");
const net = require("net");

const [protocol, port, address] = process.argv.slice(2);
if (protocol === "udp") {
  const socket = dgram.createSocket(net.isIPv6(address) ? "udp6" : "udp4");
  socket.on("message", (_, peer) => socket.send(peer.address, peer.port, peer.address));
  socket.bind(Number(port), address);
} else {
  const serve = (connection) => connection.once("data", () => connection.end(connection.remoteAddress));
  net.createServer(serve).listen(Number(port), address);
}
