package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
)

// renewalInterval is the time between two looks at the certificates. A failed renewal is tried again then, and has months.
const renewalInterval = time.Hour

// Renewal names the Secrets of a renewer, in the controller's namespace.
type Renewal struct {
	// Authority is the Secret with the signing authority, as tls.crt and tls.key. Empty: nothing is renewed.
	Authority string
	// Certificates are the Secrets whose certificates are renewed: each NAME.crt with its NAME.key. Their ca.crt, the trusted
	// authorities, stays as it is.
	Certificates []string
}

// Reasons of events of Secrets and GatewayNodes.
const (
	reasonRenewed    = "CertificatesRenewed"
	reasonNotRenewed = "CertificatesNotRenewed"
)

// renewer renews the certificates in Secrets while its replica holds the Lease. Of two replicas that both believe to hold it, the
// second to write gets a conflict, because updates carry the resource version of the Secret.
type renewer struct {
	Renewal
	namespace string
	live      client.Reader // not cached: the controller may only get Secrets, by name
	client    client.Client
	events    events.EventRecorder
	log       *slog.Logger
	now       func() time.Time
}

// run renews until ctx ends.
func (r *renewer) run(ctx context.Context) error {
	tick := time.NewTicker(renewalInterval)
	defer tick.Stop()
	for {
		r.renewAll(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// renewAll renews the certificates that are due. A fault becomes a warning of the Secret, and each time again, since events expire.
func (r *renewer) renewAll(ctx context.Context) {
	a, err := r.authority(ctx)
	if err != nil {
		r.warn(r.secret(r.Authority), err)
		return
	}
	for _, name := range r.Certificates {
		if err := r.renew(ctx, a, name); err != nil && !apierrors.IsConflict(err) { // the other writer may have renewed them
			r.warn(r.secret(name), err)
		}
	}
}

// sign signs the request of a gateway on a virtual machine. Its signature must be one that the programs with the Secrets trust; the gateway
// itself trusts nothing else.
func (r *renewer) sign(ctx context.Context, identity string, request []byte, has certs.Validity) ([]byte, error) {
	a, err := r.authority(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range r.Certificates {
		s, err := r.get(ctx, name)
		if err != nil {
			return nil, err
		}
		if err := a.CheckTrusted(s.Data[corev1.ServiceAccountRootCAKey], r.now()); err != nil {
			return nil, fmt.Errorf("secret %s: %w", name, err)
		}
	}
	return a.SignRequest(request, identity, has, r.now())
}

// renewed reports what became of the renewal of a gateway's certificate, as an event of its GatewayNode.
func (r *renewer) renewed(ctx context.Context, gateway string, err error) {
	var n v1alpha1.GatewayNode
	if err := r.client.Get(ctx, types.NamespacedName{Name: gateway}, &n); err != nil {
		return // it was deleted, or the controller stops
	}
	if err != nil {
		r.events.Eventf(&n, nil, corev1.EventTypeWarning, reasonNotRenewed, "Renew", "%s", shorten(err.Error()))
		r.log.Error("certificate of a gateway not renewed; it stays as it is", "gateway", gateway, "err", err)
		return
	}
	r.events.Eventf(&n, nil, corev1.EventTypeNormal, reasonRenewed, "Renew", "the gateway has a new certificate")
	r.log.Info("certificate of a gateway renewed", "gateway", gateway)
}

func (r *renewer) authority(ctx context.Context) (*certs.Authority, error) {
	s, err := r.get(ctx, r.Authority)
	if err != nil {
		return nil, err
	}
	return certs.ReadAuthority(certs.Pair{Cert: s.Data[corev1.TLSCertKey], Key: s.Data[corev1.TLSPrivateKeyKey]})
}

// renew renews the certificates of a Secret that are due. Those that cannot be renewed stay as they are, and are the error.
func (r *renewer) renew(ctx context.Context, a *certs.Authority, name string) error {
	s, err := r.get(ctx, name)
	if err != nil {
		return err
	}
	var faults []error
	var renewed []string
	for _, key := range slices.Sorted(maps.Keys(s.Data)) {
		base, ok := strings.CutSuffix(key, ".crt")
		if !ok || key == corev1.ServiceAccountRootCAKey {
			continue
		}
		p, err := a.Renew(certs.Pair{Cert: s.Data[key], Key: s.Data[base+".key"]}, s.Data[corev1.ServiceAccountRootCAKey], r.now())
		switch {
		case err != nil:
			faults = append(faults, fmt.Errorf("%s: %w", key, err))
		case p != nil:
			s.Data[key], s.Data[base+".key"] = p.Cert, p.Key
			renewed = append(renewed, key)
		}
	}
	if len(renewed) > 0 {
		if err := r.client.Update(ctx, s, client.FieldOwner(fieldOwner)); err != nil {
			return errors.Join(append(faults, fmt.Errorf("write the renewed certificates: %w", err))...)
		}
		r.events.Eventf(s, nil, corev1.EventTypeNormal, reasonRenewed, "Renew", "%s", shorten("renewed "+strings.Join(renewed, ", ")))
		r.log.Info("certificates renewed", "namespace", s.Namespace, "secret", s.Name, "certificates", renewed)
	}
	return errors.Join(faults...)
}

func (r *renewer) get(ctx context.Context, name string) (*corev1.Secret, error) {
	s := r.secret(name)
	return s, r.live.Get(ctx, types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s)
}

func (r *renewer) secret(name string) *corev1.Secret {
	s := &corev1.Secret{}
	s.Namespace, s.Name = r.namespace, name
	return s
}

func (r *renewer) warn(s *corev1.Secret, err error) {
	if errors.Is(err, context.Canceled) {
		return // the replica stops
	}
	r.events.Eventf(s, nil, corev1.EventTypeWarning, reasonNotRenewed, "Renew", "%s", shorten(err.Error()))
	r.log.Error("certificates not renewed; they stay as they are", "namespace", s.Namespace, "secret", s.Name, "err", err)
}
