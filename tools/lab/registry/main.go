// Registry is the lab's OCI registry. It keeps blobs in a folder, and forgets what they are part of when it ends.
//
//	registry --listen 10.0.0.1:5000 --dir /var/lib/registry
package main

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "registry:", err)
		os.Exit(1)
	}
}

func run() error {
	listen := flag.String("listen", "127.0.0.1:5000", "`address` to listen on")
	dir := flag.String("dir", "/var/lib/registry", "`folder` of the blobs")
	flag.Parse()
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	server := &http.Server{
		Addr: *listen, ReadHeaderTimeout: 10 * time.Second,
		Handler: registry.New(registry.WithBlobHandler(registry.NewDiskBlobHandler(*dir))),
	}
	return server.ListenAndServe()
}
