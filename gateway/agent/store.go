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
type store struct{ path string }

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
	return &prepared{from: f.Name(), to: s.path}, nil
}

// prepared is a file that is complete and not yet in its place.
type prepared struct{ from, to string }

func (p *prepared) commit() error {
	if err := os.Rename(p.from, p.to); err != nil {
		return fmt.Errorf("save the state: %w", err)
	}
	dir, err := os.Open(filepath.Dir(p.to))
	if err != nil {
		return fmt.Errorf("save the state: %w", err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("save the state: %w", err)
	}
	return nil
}

func (p *prepared) drop() { _ = os.Remove(p.from) }
