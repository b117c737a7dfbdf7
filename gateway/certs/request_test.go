package certs

import (
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// renewable returns the folder of a gateway whose certificate of 30 days is renewed by requests.
func renewable(t *testing.T, a *Authority) folder {
	t.Helper()
	f := newFolder(t)
	f.write(t, "gw-1", a, 30*24*time.Hour, a)
	f.Renewed = filepath.Join(t.TempDir(), "renewed.pem")
	return f
}

// has is the validity of the certificate that a source uses.
func (s *Source) has() Validity { return ValidityOf(s.current().own.Leaf) }

// request returns a source's request.
func request(t *testing.T, s *Source) []byte {
	t.Helper()
	r, err := s.Request()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// signLater signs a request some days later, for an identity.
func signLater(t *testing.T, a *Authority, request []byte, identity string, has Validity, days int) []byte {
	t.Helper()
	cert, err := a.SignRequest(request, identity, has, time.Now().Add(time.Duration(days)*24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// A requested certificate is used at once, and by the next process, until its files are replaced by newer ones. Its key has never left
// the machine, and nobody else may read it.
func TestRequestedCertificate(t *testing.T) {
	a := newAuthority(t)
	f := renewable(t, a)
	s := f.open(t)
	before := s.has()
	_ = request(t, s) // whose answer is lost
	cert := signLater(t, a, request(t, s), "gw-1", Validity{before.NotBefore, before.NotAfter.Add(24 * time.Hour)}, 0)
	if err := s.Accept(cert); err != nil {
		t.Fatal(err)
	}
	renewed := s.has()
	if !renewed.NotAfter.After(before.NotAfter) {
		t.Fatalf("it has a certificate until %s, as before", renewed.NotAfter)
	}
	client := newFolder(t)
	client.write(t, Controller, a, time.Hour, a)
	if atServer, atClient := shake(s.Server(), client.open(t).Client("gw-1")); atServer != nil || atClient != nil {
		t.Errorf("%v at the server, %v at the client", atServer, atClient)
	}
	if got := f.open(t).has(); got != renewed {
		t.Errorf("the next process has %v, want %v", got, renewed)
	}
	if info, err := os.Stat(f.Renewed); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	p, err := a.Issue("gw-1", time.Now().Add(time.Minute), 60*24*time.Hour) // by an administrator, as the key was stolen
	if err := errors.Join(err, os.WriteFile(f.Cert, p.Cert, 0o600), os.WriteFile(f.Key, p.Key, 0o600)); err != nil {
		t.Fatal(err)
	}
	if s.has() == renewed || f.open(t).has() != s.has() {
		t.Errorf("with newer files it has %v, the next process %v", s.has(), f.open(t).has())
	}
}

// A certificate that would not serve is not accepted, and the present one stays in use.
func TestRefusedCertificate(t *testing.T) {
	a, foreign := newAuthority(t), newAuthority(t)
	f := renewable(t, a)
	s := f.open(t)
	before := s.has()
	longer := Validity{before.NotBefore, before.NotAfter.Add(24 * time.Hour)}
	other := renewable(t, a).open(t)
	for name, tc := range map[string]struct {
		cert func() []byte
		says string
	}{
		"of another identity":    {func() []byte { return signLater(t, a, request(t, s), "gw-2", longer, 0) }, `for ["gw-2"]`},
		"of a foreign authority": {func() []byte { return signLater(t, foreign, request(t, s), "gw-1", longer, 0) }, "unknown authority"},
		"no longer valid": {func() []byte {
			return signLater(t, a, request(t, s), "gw-1", Validity{before.NotBefore, before.NotAfter.Add(-time.Hour)}, 0)
		}, "no later than the present one"},
		"for another key": {func() []byte {
			_ = request(t, s)
			return signLater(t, a, request(t, other), "gw-1", longer, 0)
		}, "private key does not match"},
		"garbage": {func() []byte { _ = request(t, s); return []byte("x") }, "failed to find"},
	} {
		if err := s.Accept(tc.cert()); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v, want %q", name, err, tc.says)
		}
		if got := s.has(); got != before {
			t.Errorf("%s: it has %v", name, got)
		}
	}
	if err := f.open(t).Accept(signLater(t, a, request(t, s), "gw-1", longer, 0)); err == nil || !strings.Contains(err.Error(), "since this program started") {
		t.Errorf("without a request: %v", err)
	}
	f.Renewed = ""
	fixed := f.open(t)
	if _, err := fixed.Request(); !errors.Is(err, ErrNotRenewed) || !errors.Is(fixed.Accept(nil), ErrNotRenewed) {
		t.Errorf("without a file: %v", err)
	}
}

// A renewed certificate that cannot be used leaves the files in use.
func TestUnusableRenewedCertificate(t *testing.T) {
	a, foreign := newAuthority(t), newAuthority(t)
	later := time.Now().Add(time.Minute)
	issue := func(by *Authority, identity string) []byte {
		p, err := by.Issue(identity, later, 30*24*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return append(p.Cert, p.Key...)
	}
	f := renewable(t, a)
	want := f.open(t).has()
	for name, content := range map[string][]byte{"garbage": []byte("x"), "of a foreign authority": issue(foreign, "gw-1"), "of another identity": issue(a, "gw-2")} {
		if err := os.WriteFile(f.Renewed, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := f.open(t).has(); got != want {
			t.Errorf("%s: it has %v, want %v", name, got, want)
		}
	}
	if err := os.WriteFile(f.Renewed, issue(a, "gw-1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := f.open(t).has(); got == want {
		t.Error("a good one is not used")
	}
}

// An authority signs a request that its sender has the key of, if it lives longer than the certificate.
func TestSignRequest(t *testing.T) {
	a, foreign := newAuthority(t), newAuthority(t)
	s := renewable(t, a).open(t)
	good := request(t, s)
	block, _ := pem.Decode(good)
	block.Bytes[len(block.Bytes)-1] ^= 1 // of the signature
	changed := pem.EncodeToMemory(block)
	for name, tc := range map[string]struct {
		request []byte
		has     Validity
		says    string
	}{
		"by an authority that ends": {good, Validity{time.Now(), time.Now().Add(2 * authorityLife)}, "replace it"},
		"garbage":                   {[]byte("x"), s.has(), "none in PEM"},
		"a certificate":             {a.Cert, s.has(), "none in PEM"},
		"changed":                   {changed, s.has(), "not signed with its key"},
	} {
		if _, err := a.SignRequest(tc.request, "gw-1", tc.has, time.Now()); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v, want %q", name, err, tc.says)
		}
	}
	if err := a.CheckTrusted(foreign.Cert, time.Now()); err == nil || a.CheckTrusted(a.Cert, time.Now()) != nil {
		t.Errorf("trusted by another authority: %v", err)
	}
}
