package agent

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// maxCertificate bounds a certificate in PEM with its authorities.
const maxCertificate = 16 << 10

// certificates lets the controller renew the agent's certificate: it signs a request, whose key stays on this machine.
func (a *Agent) certificates(mux *http.ServeMux, own *certs.Source) {
	mux.HandleFunc("POST /v1/certificate/request", func(w http.ResponseWriter, _ *http.Request) {
		request, err := own.Request()
		if err != nil {
			a.refuseCertificate(w, err)
			return
		}
		answer(w, http.StatusOK, desired.CertificateRequest{Request: string(request)})
	})
	mux.HandleFunc("POST /v1/certificate", func(w http.ResponseWriter, r *http.Request) {
		var c desired.Certificate
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxCertificate)).Decode(&c); err != nil {
			answer(w, invalid, desired.Refusal{Message: "read the request: " + err.Error()})
			return
		}
		if err := own.Accept([]byte(c.Certificate)); err != nil {
			a.refuseCertificate(w, err)
			return
		}
		a.cfg.Log.Info("the controller renewed the certificate")
		answer(w, http.StatusOK, struct{}{})
	})
}

func (a *Agent) refuseCertificate(w http.ResponseWriter, err error) {
	code := invalid
	if errors.Is(err, certs.ErrNotRenewed) {
		code = http.StatusNotFound // as of older agents
	}
	a.cfg.Log.Warn("certificate not renewed", "err", err)
	answer(w, code, desired.Refusal{Message: err.Error()})
}
