//! Values that state several things: JSON, `limit=10&remaining=9`, `10:60,100:3600`.
//!
//! Each of these things is read as a header of its own.

use json_event_parser::JsonEvent;

use super::family::{Header, Role};
use super::lines::{Lines, split, trim};
use crate::signal::parse::json::visit;
use crate::signal::parse::number::{digits, unquoted};

/// Calls `each` for the parts of the value. Returns whether the value has parts.
pub(in crate::signal) fn read<'a>(
    header: &Header<'a>,
    value: &'a str,
    mut each: impl FnMut(Header<'a>, &'a str),
) -> bool {
    match value.as_bytes().first() {
        Some(b'{' | b'[') => json(header, value, each),
        Some(b'0'..=b'9') if value.contains(':') => pairs(header, value, &mut each),
        Some(b'a'..=b'z' | b'A'..=b'Z') => members(header, value, &mut each),
        _ => false,
    }
}

/// `{"name":"search","limit":10,"remaining":9}`, `{"minute":{"limit":10},"day":{"limit":100}}`
fn json<'a>(
    header: &Header<'a>,
    value: &'a str,
    mut each: impl FnMut(Header<'a>, &'a str),
) -> bool {
    let (mut label, mut depth) = (None, 1);
    visit(value, |node| {
        if node.depth == 1 && node.plain_key().is_some_and(|key| is_name(header, key)) {
            label = node.plain_value();
        }
    });
    visit(value, |node| {
        if let (JsonEvent::StartObject, 1..) = (&node.value, node.depth) {
            (label, depth) = (node.plain_key(), node.depth + 1);
        }
        let member = node.plain_key().zip(node.plain_value());
        match member.filter(|_| node.depth == depth) {
            Some((key, text)) if is_name(header, key) => label = Some(text),
            Some((key, text)) => each(header.member(key, label, ""), text),
            None => {}
        }
    })
}

/// Returns whether a member with this key names the quota.
fn is_name<'a>(header: &Header<'a>, key: &'a str) -> bool {
    header.member(key, None, "").role == Role::Name
}

/// `limit=10&remaining=9`, `hour-lim:10;hour-rem:9;`, `b=hour;q=10;r=9, b=day;q=100;r=99`
fn members<'a>(
    header: &Header<'a>,
    value: &'a str,
    each: &mut impl FnMut(Header<'a>, &'a str),
) -> bool {
    let has_parts = value.contains([';', '&']);
    let mut any = false;
    for part in split(value, ',').take(Lines::MOST) {
        let name = key_values(part).find(|(key, _)| is_name(header, key));
        let label = name.map(|(_, label)| label);
        let place = if has_parts && label.is_none() && part.len() < value.len() {
            part
        } else {
            ""
        };
        for (key, value) in key_values(part) {
            any = true;
            let member = header.member(key, label, place);
            if member.role != Role::Name {
                each(member, value);
            }
        }
    }
    any
}

/// Returns the keys of a part of a value, each with its value.
fn key_values(part: &str) -> impl Iterator<Item = (&str, &str)> {
    let mark = if part.contains('&') { '&' } else { ';' };
    split(part, mark).filter_map(|text| {
        let (key, value) = text.split_once(['=', ':'])?;
        let (key, value) = (trim(key), unquoted(trim(value)));
        let is_key = key
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        (is_key && !value.is_empty()).then_some((key, value))
    })
}

/// `10:60,100:3600`: the limit in a window of some seconds, or what is used of it. A third number is
/// the time for which the limit is closed.
fn pairs<'a>(
    header: &Header<'a>,
    value: &'a str,
    each: &mut impl FnMut(Header<'a>, &'a str),
) -> bool {
    let is_count = matches!(
        header.role,
        Role::Limit | Role::Used | Role::State | Role::Open
    );
    if !is_count || split(value, ',').any(|item| numbers(item).is_none()) {
        return false;
    }
    let is_used = matches!(header.role, Role::Used | Role::State);
    let role = if is_used { Role::Used } else { Role::Limit };
    for [count, window, closed] in split(value, ',').filter_map(numbers) {
        if !is_zero(window) {
            each(header.part(role, window), count);
            each(header.part(Role::Window, window), window);
        }
        if is_used && !is_zero(closed) {
            each(header.part(Role::Reset(0), window), closed);
        }
    }
    true
}

/// Returns the two or three numbers of an item. The third one is 0 if there are two.
fn numbers(item: &str) -> Option<[&str; 3]> {
    let mut numbers = ["", "", "0"];
    for (place, text) in item.split(':').enumerate() {
        let number = numbers.get_mut(place)?;
        *number = trim(text);
        if !matches!(digits(number), (digits, "") if !digits.is_empty()) {
            return None;
        }
    }
    (!numbers[1].is_empty()).then_some(numbers)
}

fn is_zero(number: &str) -> bool {
    number.bytes().all(|digit| digit == b'0')
}
