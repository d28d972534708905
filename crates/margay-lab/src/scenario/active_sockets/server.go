// A web server that answers with its host's name. Built without cgo it is a static binary: no library of ours could get into it.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	http.HandleFunc("/host", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, os.Args[2]) })
	fmt.Fprintln(os.Stderr, http.ListenAndServe("0.0.0.0:"+os.Args[1], nil))
	os.Exit(1)
}
