package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// store is the file with the request that was applied last: a gateway that starts serves from it, whether or not a
// controller is there.
type store struct {
	path string
	// sync makes what a folder's names mean outlast the machine.
	sync func(folder string) error
}

// asideSuffix is added to the name of a file that cannot be used.
const asideSuffix = ".broken"

// read returns what was saved; nil when nothing was. A file that is not what save wrote is put aside, and the error says so.
func (s store) read() (*desired.Request, error) {
	b, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // nothing was saved, and that is no fault
	}
	if err != nil {
		return nil, fmt.Errorf("read the last state: %w", err)
	}
	r, err := desired.Parse(b, nil)
	if err != nil {
		return nil, fmt.Errorf("the last state is broken and stands in %s now: %w", s.path+asideSuffix,
			errors.Join(err, os.Rename(s.path, s.path+asideSuffix)))
	}
	return &r, nil
}

// prepare writes r beside what was saved. Then commit makes it the one that is read, and drop takes it away again.
func (s store) prepare(r desired.Request) (p *prepared, err error) {
	f, err := os.CreateTemp(filepath.Dir(s.path), filepath.Base(s.path)+".*") // mode 0600: it has passwords
	if err != nil {
		return nil, fmt.Errorf("save the state: %w", err)
	}
	_, err = f.Write(r.JSON())
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return nil, fmt.Errorf("save the state: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return &prepared{store: s, from: f.Name()}, nil
}

// restore makes before, which may be nil, the one that is read again.
func (s store) restore(before *desired.Request) error {
	if before == nil {
		if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget the state: %w", err)
		}
		return nil
	}
	p, err := s.prepare(*before)
	if err != nil {
		return err
	}
	if err := os.Rename(p.from, s.path); err != nil {
		p.drop()
		return fmt.Errorf("save the state: %w", err)
	}
	return nil
}

// syncFolder is fsync(2) of a folder.
func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	defer folder.Close()
	return folder.Sync()
}

// prepared is a file that is complete and not yet in its place.
type prepared struct {
	store
	from string
}

// commit puts the file in its place. On an error before stands there, which may be nil: who starts next must not apply what was
// refused.
func (p *prepared) commit(before *desired.Request) error {
	if err := os.Rename(p.from, p.path); err != nil {
		return fmt.Errorf("save the state: %w", err)
	}
	if err := p.sync(filepath.Dir(p.path)); err != nil {
		return fmt.Errorf("save the state: %w", errors.Join(err, p.restore(before)))
	}
	return nil
}

func (p *prepared) drop() { _ = os.Remove(p.from) }
