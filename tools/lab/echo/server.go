package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
)

// connTimeout bounds how long a silent peer may hold a connection.
const connTimeout = 10 * time.Second

// Identity is what the server says about itself.
type Identity struct {
	Cluster, Node, Pod, IP string
}

func identityFromEnv() Identity {
	return Identity{
		Cluster: os.Getenv("CLUSTER"),
		Node:    os.Getenv("NODE"),
		Pod:     os.Getenv("POD"),
		IP:      os.Getenv("POD_IP"),
	}
}

// line is the answer, with a newline. Without POD_IP it shows where the request arrived.
func (i Identity) line(local, client net.Addr) string {
	ip := i.IP
	if host, _, err := net.SplitHostPort(local.String()); ip == "" && err == nil {
		ip = host
	}
	return fmt.Sprintf("cluster=%s node=%s pod=%s ip=%s client=%s\n", i.Cluster, i.Node, i.Pod, ip, client)
}

// Server answers on the addresses that are not empty, IPv4 and IPv6.
type Server struct {
	Identity       Identity
	HTTP, TCP, UDP string
	Log            *slog.Logger
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	if s.HTTP == "" && s.TCP == "" && s.UDP == "" {
		return errors.New("nothing to serve: give --http, --tcp or --udp")
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range []struct {
		address string
		serve   func(context.Context) error
	}{{s.HTTP, s.serveHTTP}, {s.TCP, s.serveTCP}, {s.UDP, s.serveUDP}} {
		if part.address != "" {
			group.Go(func() error { return part.serve(ctx) })
		}
	}
	if err := group.Wait(); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// serveHTTP marks answers "Connection: close" only when the client asks for it.
func (s *Server) serveHTTP(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") }) //nolint:errcheck // the client left
	mux.HandleFunc("GET /stream", stream)
	mux.HandleFunc("PUT /upload", upload)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		io.WriteString(w, s.Identity.line(local, textAddr(r.RemoteAddr))) //nolint:errcheck // the client left
	})
	server := &http.Server{Addr: s.HTTP, Handler: mux, ReadHeaderTimeout: connTimeout}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	s.Log.Info("serving", "protocol", "http", "address", s.HTTP)
	return server.ListenAndServe()
}

// textAddr is an address net/http has made a string of.
type textAddr string

func (a textAddr) Network() string { return "tcp" }
func (a textAddr) String() string  { return string(a) }

func (s *Server) serveTCP(ctx context.Context) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", s.TCP)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	s.Log.Info("serving", "protocol", "tcp", "address", s.TCP)
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(connTimeout))                              //nolint:errcheck // the write fails too
			io.WriteString(conn, s.Identity.line(conn.LocalAddr(), conn.RemoteAddr())) //nolint:errcheck // the client left
		}()
	}
}

func (s *Server) serveUDP(ctx context.Context) error {
	conn, err := new(net.ListenConfig).ListenPacket(ctx, "udp", s.UDP)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	s.Log.Info("serving", "protocol", "udp", "address", s.UDP)
	buffer := make([]byte, 64<<10)
	for {
		_, client, err := conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		conn.WriteTo([]byte(s.Identity.line(conn.LocalAddr(), client)), client) //nolint:errcheck // datagrams may be lost
	}
}
