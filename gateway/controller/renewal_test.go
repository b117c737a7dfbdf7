package controller

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/certs"
)

// Names of the Secrets that grant lets the controller use.
const (
	authoritySecret = "authority"
	ownSecret       = "own"
	gatewaysSecret  = "gateways"
)

// renewalSecrets creates an authority and two Secrets with certificates of it, 300 of whose 400 days are over, and one for a
// gateway that is new.
func (w *testbed) renewalSecrets() *certs.Authority {
	w.t.Helper()
	const day = 24 * time.Hour
	a, err := certs.NewAuthority("test", time.Now().Add(-300*day))
	w.noError(err)
	issue := func(identity string, age time.Duration) certs.Pair {
		p, err := a.Issue(identity, time.Now().Add(-age), 400*day)
		w.noError(err)
		return p
	}
	own, gw1, gw2 := issue(certs.Controller, 300*day), issue("gw1", 300*day), issue("gw2", day)
	for name, data := range map[string]map[string][]byte{
		authoritySecret: {"tls.crt": a.Cert, "tls.key": a.Key},
		ownSecret:       {"tls.crt": own.Cert, "tls.key": own.Key, "ca.crt": a.Cert},
		gatewaysSecret:  {"gw1.crt": gw1.Cert, "gw1.key": gw1.Key, "gw2.crt": gw2.Cert, "gw2.key": gw2.Key, "bad.crt": []byte("x"), "ca.crt": a.Cert},
	} {
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: map[string]string{"by": "user"}}, Data: data})
	}
	return a
}

func (w *testbed) secret(name string) *corev1.Secret {
	w.t.Helper()
	s := &corev1.Secret{}
	w.noError(w.api.Get(w.t.Context(), types.NamespacedName{Namespace: w.ns, Name: name}, s))
	return s
}

// changed returns the keys whose values differ.
func changed(a, b map[string][]byte) (keys []string) {
	for key := range maps.Keys(a) {
		if string(a[key]) != string(b[key]) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// The holder of the Lease renews the certificates that are due, in the Secrets that its role names and with nothing else changed.
// Others stay, and an event names their fault.
func TestRenewal(t *testing.T) {
	w := newAPITestbed(t)
	w.renewalSecrets()
	own, gateways := w.secret(ownSecret), w.secret(gatewaysSecret)
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "foreign"}, Data: own.Data})
	r := w.runControllerWith(func(c *Config) {
		c.Renewal = Renewal{Authority: authoritySecret, Certificates: []string{"foreign", ownSecret, gatewaysSecret}}
	})
	await(t, "the certificates of gateways are renewed", func() bool {
		return slices.Equal(changed(gateways.Data, w.secret(gatewaysSecret).Data), []string{"gw1.crt", "gw1.key"})
	})
	if diff := changed(own.Data, w.secret(ownSecret).Data); !slices.Equal(diff, []string{"tls.crt", "tls.key"}) {
		t.Errorf("of its own Secret changed %v", diff)
	}
	c, err := certs.Parse(w.secret(ownSecret).Data["tls.crt"])
	w.noError(err)
	if left := time.Until(c.NotAfter); left < 399*24*time.Hour || c.DNSNames[0] != certs.Controller {
		t.Errorf("a certificate for %v, for %s", c.DNSNames, left)
	}
	if diff := changed(own.Data, w.secret("foreign").Data); len(diff) > 0 {
		t.Errorf("of a Secret that its role does not name changed %v", diff)
	}
	for about, want := range map[string]string{
		gatewaysSecret: "CertificatesNotRenewed bad.crt: ",
		ownSecret:      "CertificatesRenewed renewed tls.crt",
		"foreign":      `CertificatesNotRenewed secrets "foreign" is forbidden`,
	} {
		await(t, "Secret "+about+" has the event "+want, func() bool { return w.hasAPIEvent(about, want) })
	}
	w.noError(r.stop())
}

// hasAPIEvent reports whether the API server has an event of a Secret whose reason and note begin with a text.
func (w *testbed) hasAPIEvent(about, prefix string) bool {
	w.t.Helper()
	var all eventsv1.EventList
	w.noError(w.api.List(w.t.Context(), &all, client.InNamespace(w.ns)))
	return slices.ContainsFunc(all.Items, func(e eventsv1.Event) bool {
		return e.Regarding.Name == about && strings.HasPrefix(e.Reason+" "+e.Note, prefix)
	})
}

// newRenewer returns a renewer of the testbed that reads by live.
func (w *testbed) newRenewer(live client.Reader) *renewer {
	return &renewer{
		Renewal:   Renewal{Authority: authoritySecret, Certificates: []string{ownSecret, gatewaysSecret}},
		namespace: w.ns, live: live, client: w.api, events: recorder{w}, log: w.log, now: time.Now,
	}
}

// Nothing is written again before the next third of a lifetime, and nothing at all by a bad authority.
func TestRenewalIsIdempotent(t *testing.T) {
	w := newTestbed(t)
	w.renewalSecrets()
	r := w.newRenewer(w.api)
	r.renewAll(t.Context())
	after := w.secret(ownSecret).ResourceVersion
	r.renewAll(t.Context())
	if is := w.secret(ownSecret).ResourceVersion; is != after {
		t.Error("it was written twice")
	}
	r.now = func() time.Time { return time.Now().Add(300 * 24 * time.Hour) }
	s := w.secret(authoritySecret)
	s.Data = map[string][]byte{"tls.crt": []byte("x")}
	w.noError(w.api.Update(t.Context(), s))
	w.events = nil
	r.renewAll(t.Context())
	if is := w.secret(ownSecret).ResourceVersion; is != after || !w.hasEvent("CertificatesNotRenewed authority: read the authority: ") {
		t.Errorf("a bad authority: %v, version %s of %s", w.events, is, after)
	}
	w.noError(w.api.Delete(t.Context(), s))
	w.renewalAuthority(t)
	r.renewAll(t.Context())
	if is := w.secret(ownSecret).ResourceVersion; is != after || !w.hasEvent("CertificatesNotRenewed own: tls.crt: the signing authority is not one of the trusted authorities") {
		t.Errorf("an authority that no gateway trusts: %v, version %s of %s", w.events, is, after)
	}
}

// A gateway's request is signed if the programs with the Secrets trust the authority. The GatewayNode has an event of the result.
func TestSignForGateway(t *testing.T) {
	w := newTestbed(t)
	a := w.renewalSecrets()
	r := w.newRenewer(w.api)
	dir := t.TempDir()
	p, err := a.Issue("gw1", time.Now(), time.Hour)
	w.noError(err)
	files := certs.Files{Cert: filepath.Join(dir, "crt"), Key: filepath.Join(dir, "key"), CA: filepath.Join(dir, "ca"), Renewed: filepath.Join(dir, "renewed")}
	w.noError(errors.Join(os.WriteFile(files.Cert, p.Cert, 0o600), os.WriteFile(files.Key, p.Key, 0o600), os.WriteFile(files.CA, a.Cert, 0o600)))
	own, err := certs.Open(files, w.log)
	w.noError(err)
	request, err := own.Request()
	w.noError(err)
	has := certs.Validity{NotBefore: time.Now().Add(-300 * 24 * time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	cert, err := r.sign(t.Context(), "gw1", request, has)
	w.noError(err)
	w.noError(own.Accept(cert))
	for want, err := range map[string]error{"CertificatesRenewed gw1: the gateway has a new certificate": nil, "CertificatesNotRenewed gw1: no route to host": errors.New("no route to host")} {
		if r.renewed(t.Context(), "gw1", err); !w.hasEvent(want) {
			t.Errorf("no event %q", want)
		}
	}
	w.noError(w.api.Delete(t.Context(), w.secret(authoritySecret)))
	w.renewalAuthority(t)
	if _, err := r.sign(t.Context(), "gw1", request, has); err == nil || !strings.Contains(err.Error(), "secret own: the signing authority is not one of the trusted") {
		t.Errorf("by an authority that nobody trusts: %v", err)
	}
}

// renewalAuthority creates an authority that no Secret trusts.
func (w *testbed) renewalAuthority(t *testing.T) {
	t.Helper()
	a, err := certs.NewAuthority("another", time.Now())
	w.noError(err)
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: authoritySecret}, Data: map[string][]byte{"tls.crt": a.Cert, "tls.key": a.Key}})
}

// afterGet calls a function after each read.
type afterGet struct {
	client.Reader
	do func(client.Object)
}

func (r afterGet) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	err := r.Reader.Get(ctx, key, o, opts...)
	r.do(o)
	return err
}

// A Secret that somebody else writes at the same time, such as isthmusctl or the next leader, is not overwritten.
func TestRenewalConflict(t *testing.T) {
	w := newTestbed(t)
	w.renewalSecrets()
	was := w.secret(ownSecret)
	r := w.newRenewer(afterGet{w.api, func(o client.Object) {
		if o.GetName() != ownSecret {
			return
		}
		s := o.DeepCopyObject().(*corev1.Secret)
		s.Labels["by"] = "isthmusctl"
		w.noError(w.api.Update(t.Context(), s))
	}})
	a, err := r.authority(t.Context())
	w.noError(err)
	if err := r.renew(t.Context(), a, ownSecret); !apierrors.IsConflict(err) {
		t.Errorf("error %v, want a conflict", err)
	}
	r.renewAll(t.Context())
	if w.hasEvent("CertificatesNotRenewed own") {
		t.Error("a conflict became a warning")
	}
	is := w.secret(ownSecret)
	if diff := changed(was.Data, is.Data); len(diff) > 0 || is.Labels["by"] != "isthmusctl" {
		t.Errorf("changed %v, by %v", diff, is.Labels)
	}
}
