package withdrawal

import "time"

// source is what one member offers and has lost. The guard's lock covers it.
type source[K comparable] struct {
	born    time.Time // when the first key was offered
	offered map[K]time.Time
	lost    map[K]loss
	count   [believed + 1]int // of lost, by fate
	began   time.Time         // when the step that is not judged yet began; zero without one
	last    time.Time         // when something last vanished
	notYet  time.Time         // the step is not judged before
	hold    *hold             // nil while nothing is held
}

// loss is a key that vanished without a word.
type loss struct {
	fate  fate
	at    time.Time // when it vanished; once it is judged, when that was
	since time.Time // from when it had been offered
}

type fate int

const (
	waiting  fate = iota // for the end of its step
	held                 // not believed
	believed             // gone, and remembered for Config.Memory
)

// hold is a doubt that lasts.
type hold struct {
	of    int // what the source had
	since time.Time
}

func newSource[K comparable](now time.Time) *source[K] {
	return &source[K]{born: now, offered: map[K]time.Time{}, lost: map[K]loss{}}
}

// has notes that a key is offered. One whose loss was never believed counts as offered all the time.
func (s *source[K]) has(key K, now time.Time) {
	if _, ok := s.offered[key]; ok {
		return
	}
	since := now
	if l, ok := s.lost[key]; ok && l.fate != believed {
		since = l.since
	}
	s.drop(key)
	s.offered[key] = since
}

// withdrew notes that a key was taken back, and reports whether it was kept until now.
func (s *source[K]) withdrew(key K) bool {
	l, ok := s.lost[key]
	s.drop(key)
	delete(s.offered, key)
	return ok && l.fate != believed
}

// lose notes that a key vanished, not to be judged before a time, and reports whether a step begins with it.
func (s *source[K]) lose(key K, now, notYet time.Time) bool {
	since, ok := s.offered[key]
	if !ok {
		return false
	}
	delete(s.offered, key)
	s.put(key, loss{fate: waiting, at: now, since: since})
	s.last = now
	if notYet.After(s.notYet) {
		s.notYet = notYet
	}
	if !s.began.IsZero() {
		return false
	}
	s.began = now
	return true
}

// settled counts what is offered and was offered before the step began, a window apart; see the package's
// comment for why, and for sources that are new.
func (s *source[K]) settled(window time.Duration) int {
	before, young := s.began.Add(-window), s.born.Add(window)
	n := 0
	for _, since := range s.offered {
		if !since.After(before) || !since.After(young) {
			n++
		}
	}
	return n
}

// put and drop change lost, and keep count.
func (s *source[K]) put(key K, l loss) {
	s.drop(key)
	s.lost[key] = l
	s.count[l.fate]++
}

func (s *source[K]) drop(key K) {
	if l, ok := s.lost[key]; ok {
		s.count[l.fate]--
		delete(s.lost, key)
	}
}

// kept counts what is lost and not believed.
func (s *source[K]) kept() int { return s.count[waiting] + s.count[held] }

// turn gives losses of one fate another one, and returns how many.
func (s *source[K]) turn(from, to fate, now time.Time) int {
	n := s.count[from]
	for key, l := range s.lost {
		if l.fate == from {
			s.put(key, loss{fate: to, at: now, since: l.since})
		}
	}
	return n
}

// stepEnds returns when the step is to be judged; zero without one.
func (s *source[K]) stepEnds(window time.Duration) time.Time {
	if s.began.IsZero() {
		return time.Time{}
	}
	end := s.last.Add(window)
	if latest := s.began.Add(maxStep * window); end.After(latest) {
		end = latest
	}
	if end.Before(s.notYet) {
		return s.notYet
	}
	return end
}

// due returns when the source must be looked at again; zero means not before something happens to it.
func (s *source[K]) due(window, holdFor time.Duration) time.Time {
	next := s.stepEnds(window)
	for _, l := range s.lost {
		if end := l.at.Add(holdFor); l.fate == held && (next.IsZero() || end.Before(next)) {
			next = end
		}
	}
	return next
}
