package certs

import (
	"crypto/tls"
	"crypto/x509"
	"strings"
	"testing"
	"time"
)

// A certificate is renewed once less than a third of its lifetime is left, with the same identity and lifetime. Nothing that is
// not valid, trusted and complete is renewed.
func TestRenew(t *testing.T) {
	const day = 24 * time.Hour
	start := time.Now()
	authority := func(start time.Time) *Authority {
		t.Helper()
		a, err := NewAuthority("test", start)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	issue := func(a *Authority, identity string, life time.Duration) Pair {
		t.Helper()
		p, err := a.Issue(identity, start, life)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	a, foreign, ending := authority(start), authority(start), authority(start.Add(120*day-authorityLife))
	p := issue(a, "gw-1", 300*day)
	two, err := a.Sign(&x509.Certificate{DNSNames: []string{"gw-1", "gw-2"}, KeyUsage: x509.KeyUsageDigitalSignature}, start, 300*day)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		by      *Authority
		p       Pair
		trusted []byte
		days    int
		renewed bool
		says    string
	}{
		"not due":                         {a, p, a.Cert, 199, false, ""},
		"due":                             {a, p, a.Cert, 201, true, ""},
		"of the previous authority":       {a, issue(foreign, "gw-1", 300*day), append(append([]byte{}, foreign.Cert...), a.Cert...), 201, true, ""},
		"expired":                         {a, p, a.Cert, 301, false, "expired"},
		"the controller's, without a key": {a, Pair{issue(a, Controller, 300*day).Cert, p.Key}, a.Cert, 201, false, "private key does not match"},
		"of a foreign authority":          {a, issue(foreign, "gw-1", 300*day), a.Cert, 201, false, "unknown authority"},
		"by an authority nobody trusts":   {foreign, p, a.Cert, 1, false, "not one of the trusted"},
		"of two identities":               {a, two, a.Cert, 201, false, "2 DNS names"},
		"by an authority that ends":       {ending, issue(ending, "gw-1", 300*day), ending.Cert, 100, false, "replace it"},
		"garbage":                         {a, Pair{[]byte("x"), p.Key}, a.Cert, 201, false, "failed to find"},
		"nothing trusted":                 {a, p, nil, 201, false, "no trusted authority"},
	} {
		now := start.Add(time.Duration(tc.days) * day)
		got, err := tc.by.Renew(tc.p, tc.trusted, now)
		if (got != nil && err == nil) != tc.renewed || (err != nil) != (tc.says != "") || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %t, error %v, want %t, %q", name, got != nil, err, tc.renewed, tc.says)
			continue
		}
		if !tc.renewed {
			continue
		}
		both, err := tls.X509KeyPair(got.Cert, got.Key)
		if err != nil {
			t.Fatal(err)
		}
		if c := both.Leaf; c.DNSNames[0] != "gw-1" || len(c.DNSNames) != 1 || c.NotAfter.Sub(now.Add(300*day)).Abs() > time.Second || string(got.Key) == string(p.Key) {
			t.Errorf("%s: for %v until %s", name, c.DNSNames, c.NotAfter)
		}
	}
}
