package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Limits on the size and the pace of requests.
const (
	maxBody       = 16 << 20 // more than desired.MaxSize; 10,000 VIPs with 10 backends each are 10 MiB
	maxHeader     = 16 << 10
	headerTimeout = 5 * time.Second // includes the TLS handshake
	bodyTimeout   = 30 * time.Second
	answerTimeout = bodyTimeout + 3*applyTimeout
	idleTimeout   = 2 * time.Minute
)

// The values of Refused.Code.
const (
	invalid       = http.StatusBadRequest
	forbidden     = http.StatusForbidden
	conflict      = http.StatusConflict
	tooLarge      = http.StatusRequestEntityTooLarge
	misdirected   = http.StatusMisdirectedRequest
	internalError = http.StatusInternalServerError
)

// Refused is the reason why a request changed nothing.
type Refused struct {
	Code int // the HTTP status
	desired.Refusal
}

func (r *Refused) Error() string { return r.Message }

func refuse(code int, format string, args ...any) *Refused {
	return &Refused{Code: code, Refusal: desired.Refusal{Message: fmt.Sprintf(format, args...)}}
}

// applyFailed returns the refusal of a request that is invalid, or could not be applied.
func applyFailed(err error) *Refused {
	faults, code := allFaults(err), internalError
	if len(faults) > 0 && faults[0].Component == desired.ComponentRequest {
		code = invalid
	}
	return &Refused{Code: code, Refusal: desired.Refusal{Message: err.Error(), Faults: faults}}
}

// Serve answers the controller and the peers on l until ctx is done. The controller proves identity by its certificate.
func (a *Agent) Serve(ctx context.Context, l net.Listener, own *certs.Source, identity string) error {
	server := &http.Server{
		Handler:           a.routes(own, identity),
		TLSConfig:         own.Server(),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          debugLogger(a.cfg.Log),
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.ServeTLS(l, "", ""); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTPS on %s: %w", l.Addr(), err)
	}
	return nil
}

// routes serves flows.Path to peers, and everything else to the controller.
func (a *Agent) routes(own *certs.Source, identity string) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", authenticated(own, identity, a.whileOpen(a.handler(own))))
	if a.cfg.Flows != nil {
		mux.Handle(flows.Path, a.cfg.Flows)
	}
	return mux
}

// debugLogger logs failed connections at debug level: anybody who reaches the port decides how many there are.
func debugLogger(l *slog.Logger) *log.Logger { return slog.NewLogLogger(l.Handler(), slog.LevelDebug) }

// authenticated lets only clients with a certificate of identity through. It verifies each request.
func authenticated(own *certs.Source, identity string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := own.Verify(r.TLS, identity); err != nil {
			answer(w, forbidden, desired.Refusal{Message: err.Error()})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// whileOpen lets requests through until the agent is closed. After that it aborts the connection instead of refusing: a
// refusal would blame the Services in the request.
func (a *Agent) whileOpen(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if a.closed.Load() {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
}

func (a *Agent) handler(own *certs.Source) http.Handler {
	mux := http.NewServeMux()
	a.certificates(mux, own)
	mux.HandleFunc("POST /v1/reconfigure", a.reconfigure)
	mux.HandleFunc("GET /v1/state", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, a.Stats().Status) })
	return mux
}

func (a *Agent) reconfigure(w http.ResponseWriter, r *http.Request) {
	err := a.receive(w, r)
	if errors.Is(err, errClosed) {
		panic(http.ErrAbortHandler)
	}
	code := http.StatusOK
	no, refused := errors.AsType[*Refused](err)
	if refused {
		code = no.Code
	}
	a.updateStats(func(s *Stats) { s.Reconfigurations[code]++ })
	if refused {
		a.cfg.Log.Warn("request refused", "code", code, "err", no.Message)
		answer(w, code, no.Refusal)
		return
	}
	answer(w, code, a.Stats().Status)
}

func (a *Agent) receive(w http.ResponseWriter, r *http.Request) error {
	body := bytes.NewBuffer(make([]byte, 0, min(max(r.ContentLength, 0), maxBody)+bytes.MinRead)) // as much as it says
	_, err := body.ReadFrom(http.MaxBytesReader(w, r.Body, maxBody))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return refuse(tooLarge, "the request is larger than %d bytes", large.Limit)
	case err != nil:
		return refuse(invalid, "read the request: %v", err)
	}
	request, err := desired.Parse(body.Bytes(), a.current())
	if err != nil {
		return refuse(invalid, "%v", err)
	}
	return a.Reconfigure(r.Context(), request)
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // an error means that the client has gone
}
