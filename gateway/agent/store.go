package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// store keeps the request applied last in a file. A gateway that starts applies it, whether or not its controller
// answers.
type store struct {
	path string
	// syncFile makes the content of a file durable, syncNames the names in a folder.
	syncFile  func(*os.File) error
	syncNames func(folder string) error
}

// asideSuffix is appended to the name of a broken file.
const asideSuffix = ".broken"

// read returns the saved request, or nil. It renames a file that prepare did not write, and the error says so.
func (s store) read() (*desired.Request, error) {
	b, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no saved request is no error
	}
	if err != nil {
		return nil, fmt.Errorf("read the last state: %w", err)
	}
	r, err := desired.Parse(b, nil)
	if err != nil {
		return nil, fmt.Errorf("the last state is broken and was moved to %s: %w", s.path+asideSuffix,
			errors.Join(err, os.Rename(s.path, s.path+asideSuffix)))
	}
	return &r, nil
}

// prepare writes r to a temporary file beside the saved one, which the disk has only later: the caller need not wait for that. Then
// commit replaces the saved one, or drop removes it.
func (s store) prepare(r desired.Request) (p *prepared, err error) {
	f, err := os.CreateTemp(filepath.Dir(s.path), filepath.Base(s.path)+".*") // mode 0600: it holds passwords
	if err != nil {
		return nil, fmt.Errorf("save the state: %w", err)
	}
	if _, err = f.Write(r.JSON()); err != nil {
		return nil, fmt.Errorf("save the state: %w", errors.Join(err, f.Close(), os.Remove(f.Name())))
	}
	written := make(chan error, 1)
	go func() { written <- errors.Join(s.syncFile(f), f.Close()) }()
	return &prepared{store: s, from: f.Name(), written: sync.OnceValue(func() error { return <-written })}, nil
}

// restore saves before again, or removes the file when before is nil.
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
	if err := p.move(); err != nil {
		p.drop()
		return err
	}
	return nil
}

// syncFolder calls fsync(2) on a folder.
func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	defer folder.Close()
	return folder.Sync()
}

// prepared is a temporary file, which is complete once the disk has it.
type prepared struct {
	store
	from string
	// written waits until the disk has the file.
	written func() error
}

// move moves the file into place as soon as the disk has it.
func (p *prepared) move() error {
	err := p.written()
	if err == nil {
		err = os.Rename(p.from, p.path)
	}
	if err != nil {
		return fmt.Errorf("save the state: %w", err)
	}
	return nil
}

// commit moves the file into place. After an error, before is saved again, which may be nil: a gateway that starts next
// must not apply a refused request.
func (p *prepared) commit(before *desired.Request) error {
	if err := p.move(); err != nil {
		return err
	}
	if err := p.syncNames(filepath.Dir(p.path)); err != nil {
		return fmt.Errorf("save the state: %w", errors.Join(err, p.restore(before)))
	}
	return nil
}

// drop removes the file unless it was moved into place. p may be nil.
func (p *prepared) drop() {
	if p != nil {
		_ = p.written() // whoever drops the file does not need it
		_ = os.Remove(p.from)
	}
}
