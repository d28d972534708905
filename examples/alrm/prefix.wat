;; A module for `margay ensemble load`: requests whose key begins with "img:" go to the member that is called "images",
;; all others where libketama's ring has them. The same in Rust is in prefix.rs.
(module
  (import "margay" "ring" (func $ring (param i32 i32) (result i32)))
  (import "margay" "label" (func $label (param i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  ;; From 0 on: the frame, 2048 bytes. From 4096 on: a label.
  (data (i32.const 8192) "images")
  ;; The number of the member for images; -1: there is none.
  (global $images (mut i32) (i32.const -1))

  (func (export "alrm_version") (result i32) (i32.const 1))
  (func (export "alrm_frame") (result i32) (i32.const 0))

  ;; Whether so many bytes are the same in two places.
  (func $same (param $a i32) (param $b i32) (param $len i32) (result i32)
    (loop $next
      (if (i32.eqz (local.get $len)) (then (return (i32.const 1))))
      (local.set $len (i32.sub (local.get $len) (i32.const 1)))
      (br_if $next (i32.eq
        (i32.load8_u (i32.add (local.get $a) (local.get $len)))
        (i32.load8_u (i32.add (local.get $b) (local.get $len))))))
    (i32.const 0))

  (func (export "add_member") (param $member i32)
    (if (i32.eq (call $label (local.get $member) (i32.const 4096) (i32.const 64)) (i32.const 6))
      (then (if (call $same (i32.const 4096) (i32.const 8192) (i32.const 6))
        (then (global.set $images (local.get $member)))))))

  ;; A connection of another module, or of none, may come to this one: 1. What the other module's alrm_state has left
  ;; lies at 0, so many bytes; this module needs nothing of it.
  (func (export "adopt") (param $len i32) (result i32) (i32.const 1))

  (func (export "rm_member") (param $member i32)
    (if (i32.eq (local.get $member) (global.get $images))
      (then (global.set $images (i32.const -1)))))

  ;; The first place from here on with a byte that is no blank (of lines, too), if $blanks, or that is one.
  (func $skip (param $at i32) (param $len i32) (param $blanks i32) (result i32)
    (local $byte i32)
    (block $found
      (loop $next
        (br_if $found (i32.ge_u (local.get $at) (local.get $len)))
        (local.set $byte (i32.load8_u (local.get $at)))
        (br_if $found (i32.ne (i32.le_u (local.get $byte) (i32.const 32)) (local.get $blanks)))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $next)))
    (local.get $at))

  (func (export "redirect") (param $id i32) (param $len i32) (param $source i32) (param $rtx i64) (result i64)
    (local $key i32)
    (local $end i32)
    (local $member i32)
    ;; The key is the second word.
    (local.set $key (call $skip
      (call $skip (i32.const 0) (local.get $len) (i32.const 0))
      (local.get $len) (i32.const 1)))
    (local.set $end (call $skip (local.get $key) (local.get $len) (i32.const 0)))
    (local.set $member (call $ring (local.get $key) (i32.sub (local.get $end) (local.get $key))))
    (if (i32.and
          (i32.ge_s (global.get $images) (i32.const 0))
          (i32.eq (i32.load (local.get $key)) (i32.const 0x3a676d69)))
      (then (local.set $member (global.get $images))))
    ;; -1, which is nobody, and 0xff are the same in the lowest byte.
    (i64.extend_i32_u (i32.and (local.get $member) (i32.const 0xff)))))
