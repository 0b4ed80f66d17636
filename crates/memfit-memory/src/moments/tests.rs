//! Moments in 8 bits: forms and updates as a book has them, threads, and what is not finite.

use proptest::prelude::*;

use super::parts::{Held, narrow, numbers_in};
use super::*;
use crate::forms::NumberForm;

const ADAM: Adam = Adam {
    direction: 1.0,
    penalty: 0.0,
    decay: 0.9999,
    first_added: 0.1,
    second_stays: 0.999,
    second_added: 0.001,
    step: 0.002,
    root_correction: 10.0,
    epsilon: 1e-8,
};
const MOMENTUM: Momentum = Momentum {
    direction: 1.0,
    penalty: 0.01,
    stays: 0.9,
    added: 1.0,
    nesterov: None,
    step: 0.1,
};

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|it| it.to_ne_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let numbers = bytes.as_chunks::<WIDE>().0.iter();
    numbers.map(|&it| f32::from_ne_bytes(it)).collect()
}

fn held(moment: Moment, wide: &[f32]) -> Vec<u8> {
    let mut held = vec![0; usize::try_from(narrow(wide.len() * WIDE)).unwrap()];
    shrink(moment, &bytes(wide), &mut held).unwrap();
    held
}

fn expanded(moment: Moment, held: &[u8]) -> Vec<f32> {
    let mut wide = vec![0; numbers_in(held.len()) * WIDE];
    expand(moment, held, &mut wide).unwrap();
    numbers(&wide)
}

/// Numbers many powers of ten apart, of both signs.
fn spread(count: usize, seed: u32) -> Vec<f32> {
    let number = |i: u32| {
        let drawn = (i.wrapping_mul(2_654_435_761) ^ seed).rotate_left(13);
        let [a, b, ..] = drawn.wrapping_mul(2_246_822_519).to_ne_bytes();
        (f32::from(a) / 127.5 - 1.0) * 10.0_f32.powi(-i32::from(b % 7))
    };
    (0..u32::try_from(count).unwrap()).map(number).collect()
}

/// How far the nearest code may be: half a step of the root, of which steps are even, and a little as the root is computed.
fn is_near(found: f32, number: f32, scale: f32, codes: f32, power: i32) -> bool {
    let part = (f64::from(number.abs()) / f64::from(scale)).powf(1.0 / f64::from(power));
    let half = 0.503 / f64::from(codes);
    let least = (part - half).max(0.0).powi(power) * f64::from(scale);
    let most = (part + half).powi(power) * f64::from(scale);
    let magnitude = f64::from(found.abs());
    let tiny = f64::from(f32::MIN_POSITIVE);
    least * 0.999_999 - tiny <= magnitude && magnitude <= most * 1.000_001 + tiny
}

proptest! {
    #[test]
    fn a_first_moment_is_off_by_no_more_than_half_a_code(
        wide in prop::collection::vec(prop_oneof![4 => -4.0_f32..4.0, 2 => -1e-4_f32..1e-4, 1 => Just(0.0)], 1..600),
    ) {
        let back = expanded(Moment::First, &held(Moment::First, &wide));
        for (wide, back) in wide.chunks(BLOCK).zip(back.chunks(BLOCK)) {
            let scale = wide.iter().fold(0.0_f32, |most, it| most.max(it.abs()));
            for (&number, &found) in wide.iter().zip(back) {
                prop_assert!(is_near(found, number, scale.max(1e-30), 127.0, 4), "{number} {found} {scale}");
                prop_assert!(found == 0.0 || found.is_sign_positive() == number.is_sign_positive());
            }
        }
    }

    #[test]
    fn a_second_moment_is_near_and_never_becomes_nothing(
        wide in prop::collection::vec(prop_oneof![4 => 0.0_f32..4.0, 2 => 0.0_f32..1e-9, 1 => Just(0.0)], 1..600),
    ) {
        let back = expanded(Moment::Second, &held(Moment::Second, &wide));
        for (wide, back) in wide.chunks(BLOCK).zip(back.chunks(BLOCK)) {
            let scale = wide.iter().fold(0.0_f32, |most, &it| most.max(it));
            let least = scale * (1.0 / 255.0_f32).powi(4);
            for (&number, &found) in wide.iter().zip(back) {
                let near = is_near(found, number, scale.max(1e-30), 255.0, 4);
                let is_least = number > 0.0 && number < least && (found / least - 1.0).abs() < 1e-5;
                prop_assert!(near || is_least, "{number} {found} {scale}");
                prop_assert_eq!(found == 0.0, number == 0.0);
            }
        }
    }
}

#[test]
fn what_was_expanded_is_shrunk_to_the_same_bits() {
    let signed = spread(1000, 3);
    let squares: Vec<f32> = signed.iter().map(|it| it * it).collect();
    for (moment, wide) in [(Moment::First, signed), (Moment::Second, squares)] {
        let once = held(moment, &wide);
        assert!(held(moment, &expanded(moment, &once)) == once, "{moment:?}");
    }
    let codes: Vec<u8> = (0..=255).collect();
    let scale = 1.0_f32.to_ne_bytes();
    let all = [&codes[..], &scale[..]].concat();
    let again = held(Moment::Second, &expanded(Moment::Second, &all));
    assert_eq!(again, all);
}

/// Adam as a book has it, with the moments that an update finds.
fn adam_slowly(
    rule: Adam,
    parameter: f32,
    gradient: f32,
    first: f32,
    second: f32,
) -> (f64, f64, f64) {
    let [parameter, first, second] = [parameter, first, second].map(f64::from);
    let slope = f64::from(rule.direction * gradient) + f64::from(rule.penalty) * parameter;
    let added = f64::from(rule.first_added);
    let first = first * (1.0 - added) + added * slope;
    let second =
        second * f64::from(rule.second_stays) + f64::from(rule.second_added) * slope * slope;
    let per = second.sqrt() * f64::from(rule.root_correction) + f64::from(rule.epsilon);
    let moved = f64::from(rule.step) * first / per;
    (parameter * f64::from(rule.decay) - moved, first, second)
}

#[test]
fn an_update_by_adam_is_that_of_the_moments_it_finds() {
    for rule in [
        ADAM,
        Adam {
            direction: -1.0,
            penalty: 0.1,
            decay: 1.0,
            ..ADAM
        },
    ] {
        let count = 700;
        let (parameters, gradients) = (spread(count, 1), spread(count, 2));
        let second: Vec<f32> = spread(count, 4).iter().map(|it| it * it).collect();
        let (mut first, mut second) = (
            held(Moment::First, &spread(count, 3)),
            held(Moment::Second, &second),
        );
        let found = (
            expanded(Moment::First, &first),
            expanded(Moment::Second, &second),
        );
        let mut parameter = bytes(&parameters);
        let threads = NonZeroUsize::MIN;
        let gradient = bytes(&gradients);
        adam(
            rule,
            Form::Wide,
            &mut parameter,
            &gradient,
            &mut first,
            &mut second,
            threads,
        )
        .unwrap();
        let (mut means, mut squares) = (Vec::new(), Vec::new());
        for (i, after) in numbers(&parameter).into_iter().enumerate() {
            let (expected, mean, square) =
                adam_slowly(rule, parameters[i], gradients[i], found.0[i], found.1[i]);
            let before = f64::from(parameters[i]);
            let size = before.abs() + (expected - before).abs();
            assert!(
                (f64::from(after) - expected).abs() <= 1e-6 * size + 1e-12,
                "{i}"
            );
            means.push(mean);
            squares.push(square);
        }
        are_near(&means, &expanded(Moment::First, &first), 127.0);
        are_near(&squares, &expanded(Moment::Second, &second), 255.0);
    }
}

/// Numbers and what their codes stand for; those below the least code are not looked at.
fn are_near(expected: &[f64], found: &[f32], codes: f64) {
    for (expected, found) in expected.chunks(BLOCK).zip(found.chunks(BLOCK)) {
        let scale = expected.iter().fold(0.0_f64, |most, it| most.max(it.abs()));
        for (&number, &found) in expected.iter().zip(found) {
            let part = (number.abs() / scale).powf(0.25);
            let off = (f64::from(found.abs()) / scale).powf(0.25) - part;
            assert!(
                off.abs() * codes < 0.503 || part * codes < 1.0,
                "{number} {found}"
            );
            assert!(found == 0.0 || (found < 0.0) == (number < 0.0));
        }
    }
}

#[test]
fn an_update_by_momentum_is_that_of_the_momentum_it_finds() {
    for nesterov in [None, Some(0.9)] {
        let rule = Momentum {
            nesterov,
            ..MOMENTUM
        };
        let count = 600;
        let (parameters, gradients) = (spread(count, 1), spread(count, 2));
        let mut moved = held(Moment::First, &spread(count, 3));
        let found = expanded(Moment::First, &moved);
        let mut parameter = bytes(&parameters);
        let threads = NonZeroUsize::MIN;
        momentum(
            rule,
            Form::Wide,
            &mut parameter,
            &bytes(&gradients),
            &mut moved,
            threads,
        )
        .unwrap();
        for (i, after) in numbers(&parameter).into_iter().enumerate() {
            let [before, slope, found] = [parameters[i], gradients[i], found[i]].map(f64::from);
            let slope = slope + 0.01 * before;
            let along = 0.9 * found + slope;
            let along = if nesterov.is_some() {
                slope + 0.9 * along
            } else {
                along
            };
            let expected = before - 0.1 * along;
            let size = before.abs() + 0.1 * along.abs();
            assert!(
                (f64::from(after) - expected).abs() <= 1e-6 * size + 1e-9,
                "{i}"
            );
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let count = 5 * LEAST_OF_THREAD / 2 + 77;
    let updated = |threads: usize| {
        let mut parameter = bytes(&spread(count, 1));
        let gradient = bytes(&spread(count, 2));
        let mut first = held(Moment::First, &spread(count, 3));
        let mut second = held(Moment::Second, &vec![1e-3; count]);
        let threads = NonZeroUsize::new(threads).unwrap();
        adam(
            ADAM,
            Form::Wide,
            &mut parameter,
            &gradient,
            &mut first,
            &mut second,
            threads,
        )
        .unwrap();
        momentum(
            MOMENTUM,
            Form::Wide,
            &mut parameter,
            &gradient,
            &mut first,
            threads,
        )
        .unwrap();
        (parameter, first, second)
    };
    assert!(updated(1) == updated(3));
}

#[test]
fn what_is_not_finite_is_told_by_all_of_its_block_and_by_no_other() {
    let count = 2 * BLOCK;
    for planted in [f32::NAN, f32::INFINITY] {
        let mut gradients = vec![1.0; count];
        gradients[5] = planted;
        let mut parameter = bytes(&vec![1.0; count]);
        let (mut first, mut second) = (
            held(Moment::First, &vec![0.0; count]),
            held(Moment::Second, &vec![0.0; count]),
        );
        let threads = NonZeroUsize::MIN;
        adam(
            ADAM,
            Form::Wide,
            &mut parameter,
            &bytes(&gradients),
            &mut first,
            &mut second,
            threads,
        )
        .unwrap();
        assert_eq!(
            numbers(&parameter).iter().filter(|it| it.is_nan()).count(),
            1
        );
        for (moment, held) in [(Moment::First, first), (Moment::Second, second)] {
            let wide = expanded(moment, &held);
            assert!(wide[..BLOCK].iter().all(|it| it.is_nan()));
            assert!(wide[BLOCK..].iter().all(|it| it.is_finite()));
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let threads = NonZeroUsize::MIN;
    let said = |error: LengthError| error.to_string();
    let error = momentum(
        MOMENTUM,
        Form::Wide,
        &mut [0; 8],
        &[0; 4],
        &mut [0; 6],
        threads,
    )
    .unwrap_err();
    assert_eq!(
        said(error),
        "8 bytes of numbers go with 8 bytes of gradient, not 4"
    );
    let error = adam(
        ADAM,
        Form::Wide,
        &mut [0; 8],
        &[0; 8],
        &mut [0; 6],
        &mut [0; 5],
        threads,
    )
    .unwrap_err();
    assert_eq!(
        said(error),
        "8 bytes of numbers go with 6 bytes of second moment, not 5"
    );
    assert!(shrink(Moment::First, &[0; 7], &mut [0; 5]).is_err());
    assert_eq!(expand(Moment::First, &[], &mut []), Ok(()));
}

#[test]
fn wider_registers_change_no_bit() {
    const COUNT: usize = 3 * BLOCK + 5;
    type AdamOf<F> = fn(Registers, F, u32, Adam, &mut [u8], &[u8], [Held<'_>; 2]);
    type MomentumOf<F> = fn(Registers, F, u32, Momentum, &mut [u8], &[u8], Held<'_>);
    fn updated<F: Copy>(
        registers: Registers,
        form: F,
        bytes: fn(&[f32]) -> Vec<u8>,
        passes: (AdamOf<F>, MomentumOf<F>),
    ) -> [Vec<u8>; 3] {
        let mut parameter = bytes(&spread(COUNT, 1));
        let mut first = held(Moment::First, &spread(COUNT, 3));
        let mut second = held(Moment::Second, &vec![1e-3; COUNT]);
        let gradient = bytes(&spread(COUNT, 2));
        let moments = [first.split_at_mut(COUNT), second.split_at_mut(COUNT)];
        (passes.0)(
            registers,
            form,
            300,
            ADAM,
            &mut parameter,
            &gradient,
            moments,
        );
        let moved = first.split_at_mut(COUNT);
        (passes.1)(
            registers,
            form,
            5,
            MOMENTUM,
            &mut parameter,
            &gradient,
            moved,
        );
        [parameter, first, second]
    }
    let [any, others @ ..] = &Registers::all()[..] else {
        panic!("every processor has some")
    };
    let wide = |registers| updated(registers, Wide, bytes, (wide_adam, wide_momentum));
    let half = |registers| updated(registers, Half(7), halves, (half_adam, half_momentum));
    for &registers in others {
        assert!(wide(registers) == wide(*any), "{registers:?}");
        assert!(half(registers) == half(*any), "{registers:?}");
    }
}

/// Numbers in `bfloat16`, cut off.
fn halves(numbers: &[f32]) -> Vec<u8> {
    let upper = numbers.iter().map(|it| it.to_bits() >> 16);
    upper
        .flat_map(|it| u16::try_from(it).unwrap().to_ne_bytes())
        .collect()
}

/// The same in 32 bits.
fn widened(halves: &[u8]) -> Vec<f32> {
    let halves = halves.as_chunks::<2>().0.iter();
    halves.map(|&it| Half::read(it)).collect()
}

#[test]
fn a_narrow_parameter_becomes_one_of_the_two_that_are_next_to_what_a_wide_one_becomes() {
    let (count, threads) = (1000, NonZeroUsize::MIN);
    let (parameters, gradients) = (halves(&spread(count, 1)), halves(&spread(count, 2)));
    let updated = |form: Form, mut parameter: Vec<u8>, gradient: &[u8]| {
        let mut first = held(Moment::First, &spread(count, 3));
        let mut second = held(Moment::Second, &vec![1e-3; count]);
        adam(
            ADAM,
            form,
            &mut parameter,
            gradient,
            &mut first,
            &mut second,
            threads,
        )
        .unwrap();
        (parameter, first, second)
    };
    let wide = |numbers: &[u8]| bytes(&widened(numbers));
    let expected = updated(Form::Wide, wide(&parameters), &wide(&gradients));
    let found = updated(Form::Half(3), parameters.clone(), &gradients);
    assert!(
        expected.1 == found.1 && expected.2 == found.2,
        "moments are the same"
    );
    let (mut up, mut down) = (0, 0);
    for (expected, found) in numbers(&expected.0).into_iter().zip(widened(&found.0)) {
        let below = expected.to_bits() & 0xffff_0000;
        let (above, found) = (below.wrapping_add(1 << 16), found.to_bits());
        assert!(found == below || found == above, "{expected} {found}");
        up += usize::from(found == above);
        down += usize::from(found == below);
    }
    assert!(up > count / 4 && down > count / 4, "{up} {down}");
    let other = updated(Form::Half(4), parameters.clone(), &gradients);
    let again = updated(Form::Half(4), parameters.clone(), &gradients);
    let more = updated(Form::Half(5), parameters, &gradients);
    assert!(
        other == again && other.0 != more.0,
        "the seed alone decides"
    );
}

#[test]
fn threads_change_no_bit_of_a_narrow_parameter() {
    let count = 5 * LEAST_OF_THREAD / 2 + 77;
    let updated = |threads: usize| {
        let mut parameter = halves(&spread(count, 1));
        let gradient = halves(&spread(count, 2));
        let mut moved = held(Moment::First, &spread(count, 3));
        let threads = NonZeroUsize::new(threads).unwrap();
        let form = Form::Half(11);
        momentum(
            MOMENTUM,
            form,
            &mut parameter,
            &gradient,
            &mut moved,
            threads,
        )
        .unwrap();
        (parameter, moved)
    };
    assert!(updated(1) == updated(3));
}
