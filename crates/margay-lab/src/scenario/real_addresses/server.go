// Tells each client the address that it is seen by: PROTOCOL PORT ADDRESS.
package main

import (
	"log"
	"net"
	"os"
)

func serveTCP(place string) error {
	listener, err := net.Listen("tcp", place)
	if err != nil {
		return err
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		host, _, _ := net.SplitHostPort(connection.RemoteAddr().String())
		connection.Read(make([]byte, 64))
		connection.Write([]byte(host))
		connection.Close()
	}
}

func serveUDP(place string) error {
	socket, err := net.ListenPacket("udp", place)
	if err != nil {
		return err
	}
	buffer := make([]byte, 2048)
	for {
		_, peer, err := socket.ReadFrom(buffer)
		if err != nil {
			return err
		}
		host, _, _ := net.SplitHostPort(peer.String())
		socket.WriteTo([]byte(host), peer)
	}
}

func main() {
	place, serve := net.JoinHostPort(os.Args[3], os.Args[2]), serveTCP
	if os.Args[1] == "udp" {
		serve = serveUDP
	}
	log.Fatal(serve(place))
}
