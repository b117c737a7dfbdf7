package certs

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"
)

// Folder holds an authority and all its certificates, on the machine of an administrator. It contains the authority's
// key: keep it safe.
//
//	authority.pem                  current authority, certificate and key
//	next.pem, signing.pem          next authority, during a rotation
//	NAME/tls.crt, tls.key, ca.crt  files of the program with that identity
type Folder struct{ Path string }

// Step is a step of an authority rotation. Before the next step, every program must have its new files.
type Step string

// The steps in order. No program ever meets a certificate that it does not trust.
const (
	Begin Step = "begin" // trust the next authority as well
	Use   Step = "use"   // sign with it
	End   Step = "end"   // stop trusting the previous one
)

// Order tells Update what to do.
type Order struct {
	Identities []string // to create; existing ones are kept
	Life       time.Duration
	Renew      bool // renew all certificates, however long they are valid
	Step       Step // "" for none
}

// Issued is an identity whose files were written, with the end of its certificate's validity.
type Issued struct {
	Identity string    `json:"identity"`
	Until    time.Time `json:"until"`
	Files    Files     `json:"files"`
}

// Files returns the files of an identity.
func (f Folder) Files(identity string) Files {
	dir := filepath.Join(f.Path, identity)
	return Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
}

// identity matches DNS names, which are also used as folder names.
var identity = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$`)

// Update creates missing certificates, and renews those with less than a third of their lifetime left. It returns what it
// wrote and leaves the rest alone. It can be repeated at any time, also after an interruption.
func (f Folder) Update(o Order, now time.Time) (done []Issued, err error) {
	if err := os.MkdirAll(f.Path, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of certificates: %w", err)
	}
	signer, believed, err := f.authorities(o.Step, now)
	if err != nil {
		return nil, err
	}
	all, err := f.Identities()
	if err != nil {
		return nil, err
	}
	for _, name := range o.Identities {
		if !identity.MatchString(name) {
			return nil, fmt.Errorf("%q is not an identity: use a DNS name of lower-case letters, digits and dashes", name)
		}
	}
	all = append(all, o.Identities...)
	slices.Sort(all)
	for _, name := range slices.Compact(all) {
		d, err := f.issue(name, signer, believed, o, now)
		if err != nil {
			return done, fmt.Errorf("certificate of %s: %w", name, err)
		}
		if d != nil {
			done = append(done, *d)
		}
	}
	return done, nil
}

// Identities returns the identities in the folder.
func (f Folder) Identities() (all []string, err error) {
	found, err := filepath.Glob(filepath.Join(f.Path, "*", "tls.crt"))
	for _, path := range found {
		all = append(all, filepath.Base(filepath.Dir(path)))
	}
	return all, err
}

// Signer returns the authority that signs now.
func (f Folder) Signer(now time.Time) (*Authority, error) {
	signer, _, err := f.authorities("", now)
	return signer, err
}

// Files with the certificate and key of an authority. A rotation renames them, which is atomic.
const (
	authorityFile = "authority.pem"
	nextFile      = "next.pem"    // trusted, and signs nothing yet
	signingFile   = "signing.pem" // signs, while the previous one is still trusted
)

// authorities performs a step, and returns the signing authority and the trusted certificates.
func (f Folder) authorities(step Step, now time.Time) (signer *Authority, believed []byte, err error) {
	if step != "" {
		if err := f.step(step, now); err != nil {
			return nil, nil, err
		}
	}
	current, err := f.authority(authorityFile)
	if current == nil && err == nil {
		current, err = f.create(authorityFile, now)
	}
	if err != nil {
		return nil, nil, err
	}
	next, nextErr := f.authority(nextFile)
	signing, signingErr := f.authority(signingFile)
	if err := errors.Join(nextErr, signingErr); err != nil {
		return nil, nil, err
	}
	signer, believed = current, current.Cert
	if next != nil {
		believed = slices.Concat(believed, next.Cert)
	}
	if signing != nil {
		signer, believed = signing, slices.Concat(believed, signing.Cert)
	}
	return signer, believed, nil
}

// step performs a step of a rotation. A completed step is no error.
func (f Folder) step(step Step, now time.Time) error {
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(f.Path, name))
		return err == nil
	}
	become := func(from, to string) error {
		return os.Rename(filepath.Join(f.Path, from), filepath.Join(f.Path, to))
	}
	next, signing := has(nextFile), has(signingFile)
	switch {
	case step == Begin && signing:
		return fmt.Errorf("the next authority already signs: continue with %q", End)
	case step == Begin && !next:
		_, err := f.create(nextFile, now)
		return err
	case step == Begin, step == Use && signing:
		return nil
	case step == Use && next:
		return become(nextFile, signingFile)
	case step == End && signing:
		return become(signingFile, authorityFile)
	case step == End && next:
		return fmt.Errorf("the next authority signs nothing yet: %q comes first", Use)
	case step == Use, step == End:
		return fmt.Errorf("no authority is being changed: %q comes first", Begin)
	}
	return fmt.Errorf("there is no step %q: it is %q, %q or %q", step, Begin, Use, End)
}

// authority reads an authority; nil if it does not exist.
func (f Folder) authority(name string) (*Authority, error) {
	path := filepath.Join(f.Path, name)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no authority is no error
	}
	if err != nil {
		return nil, fmt.Errorf("read the authority: %w", err)
	}
	block, key := pem.Decode(b)
	if block == nil {
		return nil, fmt.Errorf("read the authority: %s is not PEM", path)
	}
	a, err := ReadAuthority(Pair{Cert: pem.EncodeToMemory(block), Key: key})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}

func (f Folder) create(name string, now time.Time) (*Authority, error) {
	a, err := NewAuthority("isthmus-gateway "+now.UTC().Format(time.DateOnly), now)
	if err != nil {
		return nil, err
	}
	return a, write(filepath.Join(f.Path, name), slices.Concat(a.Cert, a.Key), 0o600)
}

// issue writes the files of an identity, unless they are still good.
func (f Folder) issue(identity string, signer *Authority, believed []byte, o Order, now time.Time) (*Issued, error) {
	files := f.Files(identity)
	if !o.Renew && f.good(files, signer, believed, now) {
		return nil, nil //nolint:nilnil // nothing was written
	}
	p, err := signer.Issue(identity, now, o.Life)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(files.Cert), 0o700); err != nil {
		return nil, err
	}
	if err := errors.Join(write(files.CA, believed, 0o644), write(files.Key, p.Key, 0o600), write(files.Cert, p.Cert, 0o644)); err != nil {
		return nil, err
	}
	c, err := Parse(p.Cert)
	if err != nil {
		return nil, err
	}
	return &Issued{Identity: identity, Until: c.NotAfter.UTC(), Files: files}, nil
}

// good reports whether files are from the current authorities and have more than a third of their lifetime left.
func (f Folder) good(files Files, signer *Authority, believed []byte, now time.Time) bool {
	if _, err := read(files); err != nil {
		return false
	}
	ca, err := os.ReadFile(files.CA)
	if err != nil || !bytes.Equal(ca, believed) {
		return false
	}
	b, err := os.ReadFile(files.Cert)
	if err != nil {
		return false
	}
	c, err := Parse(b)
	return err == nil && c.CheckSignatureFrom(signer.cert) == nil && !ValidityOf(c).RenewalDue(now)
}

// write replaces a file atomically.
func write(path string, b []byte, mode fs.FileMode) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
